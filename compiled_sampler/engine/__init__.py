"""What an engine holds: requests in slots, plans, and steps on one of the backends."""
