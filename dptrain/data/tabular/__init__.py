"""Tables: reading them, and what each column is."""
