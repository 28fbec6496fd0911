"""What one does with a trained model: text written from a prompt (`writing`), a finished run opened again (`opening`)."""
