"""Starting and stopping ranks."""
