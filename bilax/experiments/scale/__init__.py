"""What grows with K, with the follower, with the examples and with the devices."""
