"""What the service and the processes of an engine add to its work."""
