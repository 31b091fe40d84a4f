"""Generated word problems with planted defects, and the time that `asterism data clean` needs for them."""
