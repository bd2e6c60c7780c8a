"""How the follower moves, and what is kept of its way."""
