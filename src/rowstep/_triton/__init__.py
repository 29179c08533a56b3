"""The kernels for GPUs, in Triton. ``_backends/triton.py`` launches them; the reference says what they must compute.

A step sorts the row numbers of a gradient, stably, and launches a program for every occurrence. The first program of a
*run*, the occurrences of one row, sums the run and steps the row; the others end at once. So the grid is known without
asking the device how many distinct rows there are, and nothing waits for it.

Why no two programs of a launch write the same address
------------------------------------------------------
``step_rows``, ``catch_up_rows``    A row belongs to the first program of its run, and sorted numbers have one run per
                                    row: that program alone writes p, m, v, u, the count and the note of the row. Of
                                    what is kept by program (skipped and stale rows), each has a place of its own. Ids
                                    outside of the table lie at the ends of the sorted ones, and program 0 reports them.
``sum_chunks``                      A program writes one block of columns of one chunk.
``norm_rows``                       A program writes one number, in its own place.

A program has up to four warps. All of them read what is kept for a row as a whole, and one of them writes it: behind a
barrier, or the others could read what is new. Launches follow each other on one stream, so the next can read what one
has written. There are no atomic operations, and every sum has a fixed order: the same input gives the same bits.
"""
