"""Generated code of the API; see proto/frostline/v1/embedding.proto."""
