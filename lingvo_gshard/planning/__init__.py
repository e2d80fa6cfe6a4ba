"""Planning for machines not at hand: memory, roofline, search, and the tables of the paper.

Read from the bottom up: `request` says what is planned and `plan` what a plan holds. `estimate`
predicts a training step by arithmetic alone, and `compiled` reads what XLA's compilers made of a
program. `published` has steps that others measured, which turn a bound into an expected time.
`kept_plans` makes a plan and keeps it in a folder, and `plan_text` and `plan_pictures` show it. On
these stand the tables of several plans in `tables`, and `commands` for the binary. `any_program`
plans programs that others wrote, from what `compiled` reads of them.
"""
