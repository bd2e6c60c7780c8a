"""φ(x, z), and how it is differentiated."""
