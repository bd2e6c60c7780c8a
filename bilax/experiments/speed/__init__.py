"""What bilax costs."""
