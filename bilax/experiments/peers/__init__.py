"""bilax beside other programs, each in its own environment."""
