"""Any other decoder, through the library transformers' own modelling code.

config.py  its sizes, read off the code itself without weights, or the reason why it cannot be served
load.py    weights, our layers put in, the result checked against the library's own
model.py   the model under `CausalLM`
attention.py  what its layers call in place of their own attention and experts
"""
