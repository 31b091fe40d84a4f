"""Each of [[stages]] is a separate run, in a folder of the whole run, and continues the stage before."""
