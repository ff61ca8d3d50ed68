"""Planning before a run starts: resource estimates, and checks that refuse what cannot work."""
