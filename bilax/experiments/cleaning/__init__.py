"""Data hyper-cleaning, and the tool for a person's own labels."""
