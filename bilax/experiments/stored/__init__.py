"""What is made of the numbers in results/: the pages of claims and of peers, which are stale, all of them anew."""
