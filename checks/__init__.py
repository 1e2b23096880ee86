"""What tapcheck claims about captures, and how each claim is judged."""
