"""What both services and their clients share about gRPC: errors, interceptors, serving, a small client."""
