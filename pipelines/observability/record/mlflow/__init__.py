"""MLflow tracking of a run: client process, logging, links and the UI."""
