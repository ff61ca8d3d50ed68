"""What values of keys mean: paths, draft trees, options of other servers."""
