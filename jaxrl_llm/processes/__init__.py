"""Processes of this machine: how they are started, limited, ended and talked to."""
