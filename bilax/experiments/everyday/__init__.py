"""Ordinary bilevel problems, as users bring them, and how far the default call gets on each."""
