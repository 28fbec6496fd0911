"""Everything that a run measures and shows: metrics and their journal, MLflow, profiles, hardware, the report page."""
