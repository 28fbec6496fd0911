"""What is trained: one file a task against the protocol in `task`, chosen by the setting `task`."""
