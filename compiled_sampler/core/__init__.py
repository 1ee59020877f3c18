"""The mathematics of a token: order, mass, noise, filters, score. Pure tensor functions; no device, no schedule.

Dims and names mean the same in every stage, here and on the floors above. R rows of logits, N requests, D drafts, K
drafts of a request at most, S slots, V tokens, B blocks of a row, C candidates::

    logits            float32, bfloat16 or float16 [R, >=V]; columns from V on are not read; x is float32
    slots             int64 [R] or [N]; -1 for padding
    positions         int64 [R], of the token to draw
    num_drafts        int64 [N], 0..K; -1 for padding without rows
    draft_token_ids   int64 [N, K]
    scale             float32 [R], log2(e) / temperature; t is a scaled logit
    top_k, top_p      int64 and float64 [R]
    row_max           float32 [R], the largest logit
    row_mass, masses  int64 [R] or [R, B], in units of 2**-40
    ids, token_ids    int32 and int64
    row_ids           int64 [n], which rows of the logits are read; None for all
    keys              int32, order keys or score keys; of a block its largest
    packed, ordered   int64, (order key, id) in one number; ordered is descending
    nan_bits          int32, above POSITIVE_INFINITY_KEY where a part of a row holds a NaN
    block, slices     tokens of a block, and the slices that it is reduced in
    by_bits           reduce bits of floats instead of keys: fewer instructions, where arithmetic keeps denormals
    by_key            compare by keys, which denormal modes do not change, instead of by logits
    base_is_row       top-p is a share of the whole row's mass instead of the mass after top-k
    run               how a stage is run: in eager torch, compiled, recorded; no result depends on it
"""
