"""Wrong labels: which they are, judged from a few that are trusted, with what others would do beside it."""
