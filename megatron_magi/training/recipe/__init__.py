"""What a run is: typed values, their checks, and the YAML files that hold them."""
