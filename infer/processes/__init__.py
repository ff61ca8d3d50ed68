"""The target as a shard, alone or one of several ranks: threads, exactness, communication, processes."""
