"""What a kernel is told: the words of a launch, of its jobs, and of the pieces that threads share them in.

A launch takes *jobs*, records of ``JOB_WORDS`` 64-bit words that say where a gradient, its table and its state are.
Threads share a launch by rows (``share``): a *piece* is a range of a job's rows. No row is in two pieces, so the result
has the same bits for any number of threads.
"""

# Where the jobs are, the pieces (0 if one thread makes them all), and for each part of the work room for keys, for a
# row to sum in, and for its result; where ``ids.group`` begins; and the order of a norm.
JOBS_AT, JOB_COUNT, PIECES_AT, KEYS_AT, SPARE_AT, TOTALS_AT, TOTALS_STRIDE, RESULTS_AT, GROUP_AT, POWER = range(10)
LAUNCH_WORDS = 10

# Of the gradient: where it is, and the note that its rows get. Of the table: what it is like, and where it and its
# state are. Of the step: the key of random rounding, and scalars; what a rule does not have is 1 or 0 there.
ROWS_AT, COUNT, G_AT, G_STRIDE, POSITION_BITS, NOTE = range(6)
ROW_COUNT, COLUMNS, ROW_BITS, P_AT, M_AT, V_AT, U_AT, COUNTS_AT, NOTES_AT = range(6, 15)
TABLE_FROM, TABLE_WORDS = ROW_COUNT, 9
KEY = 15
BETA1, BETA2, EPS, STEP_SIZE, SHRINK, DECAY, SIGN = range(16, 23)
JOB_WORDS = 23
JOB_BYTES = JOB_WORDS * 8

# A job, the rows low..high-1 of its table, and where in the keys it may group them.
JOB, LOW, HIGH, KEYS_FROM = range(4)
PIECE_BYTES = 32
