"""`doctor --hosts`: whether several hosts are alike and reach each other."""
