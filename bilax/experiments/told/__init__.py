"""Pages that tell what is stored in results/: the paper claim by claim, and bilax beside its peers."""
