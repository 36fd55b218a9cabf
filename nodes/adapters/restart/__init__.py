"""What a new process does with the shapes that an earlier one used."""
