"""Is the answer to be believed?"""
