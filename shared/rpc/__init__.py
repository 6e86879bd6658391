"""gRPC code shared by both services and their clients: errors, interceptors, serving, a small client."""
