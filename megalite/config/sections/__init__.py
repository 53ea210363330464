"""One module a section of the config; `config.schema` puts them together."""
