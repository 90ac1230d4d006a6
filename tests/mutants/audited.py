"""The seeded bugs of scale, group or count on the way of a gradient from backward to the update:
the audit alone must convict each of them, without a one-process run to compare with. Names and
tests are those of mutants.py."""

RANDOM = "audit_test:Audit.WhatIsMeasured*"
UPDATE = "audit_test:Audit.TellsHowTheUpdate*"
TRAINING = "trainer_audit_test:TrainerAudit.OfDense*"
DEVICES = "trainer_audit_test:DeviceAudit*"

AUDITED = {
    # Scale
    "average-over-dp-alone": RANDOM,
    "expert-factor": RANDOM,
    "divided-by-micro-batches-twice": TRAINING,
    "tokens-of-one-rank": RANDOM,
    "token-count-in-32-bits": RANDOM,
    "loss-scale-stays": UPDATE,
    "clips-upwards": UPDATE,
    "factor-forgotten-on-devices": DEVICES,
    # Groups
    "layernorm-not-reduced": RANDOM,
    "tied-gradient-twice": RANDOM,
    "tied-gradient-never": RANDOM,
    "ties-cut-apart": RANDOM,
    "instances-not-added": RANDOM,
    "norm-over-tp-alone": RANDOM,
    # Counts
    "launched-a-micro-batch-early": RANDOM,
    "last-bucket-not-flushed": RANDOM,
    "norm-counts-replicas": RANDOM,
    "norm-counts-tied-twice": RANDOM,
    "zeros-count-padding": RANDOM,
    "shard-of-the-first-bucket": RANDOM,
}

# Bugs of scale, group or count that are not on that way.
BACKWARD = "in forward or backward, whose place the markers take; the tests above see it"
NO_GRADIENT = "no gradient goes there"
BEYOND = {
    "input-gradient-not-reduced": BACKWARD,
    "gradient-times-ranks": BACKWARD,
    "gradient-of-a-sum-added": BACKWARD,
    "bias-on-each-rank": BACKWARD,
    "smoothing-over-one-part": BACKWARD,
    "weight-part-left-out": BACKWARD,
    "frozen-experts-over-dp": NO_GRADIENT + ": the parameter is frozen",
    "router-bias-not-synced": NO_GRADIENT + ": the bias moves by counts of tokens",
    "router-bias-over-dp": NO_GRADIENT + ": the bias moves by counts of tokens",
    "routers-not-abandoned": NO_GRADIENT + ": the bias moves by counts of tokens",
    "abandoned-step-counts-as-zero": "in a step that is given up; the audit makes steps that end",
    "tokens-of-all-tp-ranks": "the count is of the metrics; gradients are divided by another one",
    "same-samples-on-each-rank": "the samples are wrong, and each gradient of them is right",
    "recorded-for-another-batch": "in recorded work; the audit launches its own backwards",
}
