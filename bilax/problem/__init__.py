"""What is to be solved: both objectives, the sets, and checks of what a user hands in."""
