"""`octavo bench`: the speed of a server with OpenAI's API, alone or beside another one.

`command`: flags ─> `workloads`: prompts of a round ─> `drive`: the closed loop ─> `report`: table and JSON
                                                           └─ `endpoint`: HTTP ─> `values`: what a server says
"""
