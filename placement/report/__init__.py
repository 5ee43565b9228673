"""What people look at: tables, Gantt pictures and traces, of predicted and measured alike."""
