"""What people and machines can see while evald runs."""
