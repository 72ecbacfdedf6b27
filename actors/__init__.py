"""Hold: processes, sockets, GPUs and shared memory, each behind one owner."""
