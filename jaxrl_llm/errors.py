"""The root of all errors that a user can mend."""


class UserError(Exception):
    """Something about the run, its files or its machine is wrong; the message says what to do.

    Programs in `launch/` show the message without a traceback.
    """
