"""What two parties keep of finished runs: a bundle that the other verifies, comparison of records, history."""
