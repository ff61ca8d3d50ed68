"""Connections and host names: what a client may do before its request is one."""
