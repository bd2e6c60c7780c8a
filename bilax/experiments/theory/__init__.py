"""The paper's lemmas and theorems, measured."""
