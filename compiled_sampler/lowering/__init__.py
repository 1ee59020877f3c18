"""From stages to kernels: the one place that calls ``torch.compile`` and names Inductor.

The way of a stage: the first call whose code nobody asked for puts a ``WantedStage`` into the queue, and runs in eager
torch. A thread loads the code from disk; what is not there a process compiles and keeps, and the thread loads it then.
The next call takes over what is "ready"; of what "failed" it warns, and stays in eager torch. ``warmup()`` runs every
step with what is on disk. If a stage is missing it lists the stages of all steps, asks for them before all others,
compiles from the end of the queue itself, and runs every step then. ``warmup(wait=False)`` lists and asks alone.

Modules, from the entry point down::

    compiled_stages             CompiledStages: the ``run`` of a stage: eager until its compiled code is there
    comparison                  on an untested torch: a compiled stage against eager torch, bit for bit, before its use
    compile_queue               QUEUE: what calls and warm-ups want; threads load it, or have it compiled
    compile_process             CompileProcess: a process that compiles one stage after the other, at low priority
    stage_code                  StageCode: the code of one stage, from disk or compiled here, and with which options

    inductor.disk_cache         compiled stages on disk: their names, and the lock of the process that compiles one
    inductor.compilation        one stage through Inductor, ahead of its first run
    inductor.triton_kernels     Inductor's Triton kernels with the declared tiling and rewritten source
    inductor.patches            patches of Inductor, each a context
    inductor.versions           the torch versions on which the above was checked; guards of how tensors are laid out

    layouts                     TensorSpec, and what else distinguishes the tensors of calls
    tuning                      TUNING: one declaration a stage of how Inductor shapes its kernels
"""
