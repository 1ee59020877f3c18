"""What a sampler holds by slot, on the host and on the device.

Modules, from the entry point down::

    slots          SlotState: the requests by slot, and which modes cover them
    edit_slots     EditSlots: the edits of requests by slot, and the tables that steps read; RowLayout: where they stand
                   in a slot's row; TokenHistory: the tokens of requests by position
    custom_edits   CustomEditSet: the edits that users write; EditStates: what these read by slot, which engines write
    uploads        StagedTable: parameters on the device, and how they get there; LogprobTables: what steps with
                   logprobs read
"""
