"""Problems with known answers."""
