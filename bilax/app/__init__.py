"""The command line: run folders, reports, tables and pictures."""
