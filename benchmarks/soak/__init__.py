"""Mixed load and disk faults for as long as you like: see `__main__`."""
