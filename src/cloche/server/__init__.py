"""Our own faces. `keeper` serves the SDK and the thin client on the state directory's unix socket."""
