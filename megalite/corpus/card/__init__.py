"""The card of a prepared set: what it is made of, what each station took away, and how to make it again."""
