"""Where KV lives: the device pool of a node now; host memory and disk below it later."""
