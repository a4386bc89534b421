"""What a plan does, as numbers and as pictures (matplotlib, the optional extra ``viz``)."""
